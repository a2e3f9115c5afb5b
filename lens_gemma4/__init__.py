"""A TransformerLens-style HookedModel of Gemma 4 12B "unified", bit-identical to transformers."""

from lens_gemma4 import patching, utils
from lens_gemma4.attribution import Attribution, Target
from lens_gemma4.cache import ActivationCache
from lens_gemma4.changes import region, swapped
from lens_gemma4.circuits import SVDInterpreter
from lens_gemma4.config import ConfigError, HookedConfig
from lens_gemma4.edges import Edges, edge_attribution
from lens_gemma4.errors import HookNameError, HookShapeError, Unavailable
from lens_gemma4.estimates import Estimate, attribution_ablate, attribution_patch
from lens_gemma4.factored import FactoredMatrix
from lens_gemma4.heads import detect_head
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.hooks import HookedRootModule, HookPoint
from lens_gemma4.knockouts import knockout
from lens_gemma4.kv_cache import KVCache
from lens_gemma4.lenses import Lens, logit_lens
from lens_gemma4.loading import CheckpointError
from lens_gemma4.maps import ablate, patch
from lens_gemma4.metrics import (
    kl_to_clean,
    log_prob,
    logit,
    logit_difference,
    loss,
    prob,
    rank,
)
from lens_gemma4.pairs import PairEffects, pair_effects
from lens_gemma4.patchscopes import Patchscope, patchscope
from lens_gemma4.paths import path_patch
from lens_gemma4.results import SweepResult
from lens_gemma4.selection import greedy, top_k
from lens_gemma4.spans import ImageFeatures, Inputs, Span, token_labels
from lens_gemma4.tuned_lens import TunedLens, train_tuned_lens
from lens_gemma4.version import __version__

__all__ = [
    "ActivationCache",
    "Attribution",
    "CheckpointError",
    "ConfigError",
    "Edges",
    "Estimate",
    "FactoredMatrix",
    "HookNameError",
    "HookPoint",
    "HookShapeError",
    "HookedConfig",
    "HookedModel",
    "HookedRootModule",
    "ImageFeatures",
    "Inputs",
    "KVCache",
    "Lens",
    "PairEffects",
    "Patchscope",
    "SVDInterpreter",
    "Span",
    "SweepResult",
    "Target",
    "TunedLens",
    "Unavailable",
    "__version__",
    "ablate",
    "attribution_ablate",
    "attribution_patch",
    "detect_head",
    "edge_attribution",
    "greedy",
    "kl_to_clean",
    "knockout",
    "log_prob",
    "logit",
    "logit_difference",
    "logit_lens",
    "loss",
    "pair_effects",
    "patch",
    "patching",
    "patchscope",
    "path_patch",
    "prob",
    "rank",
    "region",
    "swapped",
    "token_labels",
    "top_k",
    "train_tuned_lens",
    "utils",
]
