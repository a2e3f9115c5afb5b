"""Reads a checkpoint in any of transformers' spellings and writes it as every supported release reads it.

    python weights/convert.py SOURCE TARGET [--dtype bfloat16] [--max-shard-size 5GB]

The same as `lens-gemma4 convert`.
"""

import argparse
from pathlib import Path

from lens_gemma4.loading import DTYPES, convert


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help='a folder, a Hub id, or "tiny"')
    parser.add_argument("target", type=Path)
    parser.add_argument(
        "--dtype", choices=DTYPES, help="to write in; by default the checkpoint's own"
    )
    parser.add_argument("--max-shard-size", default="5GB")
    args = parser.parse_args()
    dtype = None if args.dtype is None else DTYPES[args.dtype]
    print(convert(args.source, args.target, dtype=dtype, max_shard_size=args.max_shard_size))


if __name__ == "__main__":
    main()
