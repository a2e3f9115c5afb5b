"""A TransformerLens-style HookedModel of Gemma 4 12B "unified", bit-identical to transformers."""

from lens_gemma4 import utils
from lens_gemma4.attribution import Attribution, Target
from lens_gemma4.cache import ActivationCache
from lens_gemma4.circuits import SVDInterpreter
from lens_gemma4.config import ConfigError, HookedConfig
from lens_gemma4.errors import HookNameError, HookShapeError, Unavailable
from lens_gemma4.factored import FactoredMatrix
from lens_gemma4.heads import detect_head
from lens_gemma4.hooked_model import HookedModel
from lens_gemma4.hooks import HookedRootModule, HookPoint
from lens_gemma4.lenses import Lens, logit_lens
from lens_gemma4.loading import CheckpointError
from lens_gemma4.patchscopes import Patchscope, patchscope
from lens_gemma4.tuned_lens import TunedLens, train_tuned_lens

__version__ = "0.1.0"

__all__ = [
    "ActivationCache",
    "Attribution",
    "CheckpointError",
    "ConfigError",
    "FactoredMatrix",
    "HookNameError",
    "HookPoint",
    "HookShapeError",
    "HookedConfig",
    "HookedModel",
    "HookedRootModule",
    "Lens",
    "Patchscope",
    "SVDInterpreter",
    "Target",
    "TunedLens",
    "Unavailable",
    "detect_head",
    "logit_lens",
    "patchscope",
    "train_tuned_lens",
    "utils",
]
