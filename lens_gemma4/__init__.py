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
from lens_gemma4.maps import ablate, knockout, patch
from lens_gemma4.metrics import (
    kl_to_clean,
    log_prob,
    logit,
    logit_difference,
    loss,
    prob,
    rank,
)
from lens_gemma4.patchscopes import Patchscope, patchscope
from lens_gemma4.results import SweepResult
from lens_gemma4.tuned_lens import TunedLens, train_tuned_lens
from lens_gemma4.version import __version__

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
    "SweepResult",
    "Target",
    "TunedLens",
    "Unavailable",
    "__version__",
    "ablate",
    "detect_head",
    "kl_to_clean",
    "knockout",
    "log_prob",
    "logit",
    "logit_difference",
    "logit_lens",
    "loss",
    "patch",
    "patchscope",
    "prob",
    "rank",
    "train_tuned_lens",
    "utils",
]
