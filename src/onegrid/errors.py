"""The error tree: what a user can meet, by kind. A message says what was wrong, what is allowed and what to do."""


class OnegridError(Exception):
    """Base of all errors that onegrid raises on purpose."""


class ConfigError(OnegridError):
    """A configuration file, key or value is not usable."""


class FormatError(OnegridError):
    """A tensor, shape or option does not fit a number format."""


class NonFiniteError(OnegridError):
    """NaN or Inf where only finite numbers are allowed; names the tensor and the count."""


class RecipeError(OnegridError):
    """A recipe does not decide every tensor exactly once, or a rule matches nothing."""


class SpecError(OnegridError):
    """A model configuration describes an impossible or unsupported model."""


class WeightsError(OnegridError):
    """A checkpoint has a missing, extra, truncated or wrongly shaped tensor."""


class CapabilityError(OnegridError):
    """A sampler or learner was asked for something that it says it cannot do.

    tensors  canonical names concerned, where weights are what it cannot take
    """

    def __init__(self, message: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tensors = tensors


class TaskError(OnegridError):
    """A task or reward yields nothing usable."""


class EmptyBatchError(OnegridError):
    """A statistic or loss was asked of zero tokens."""


class SyncError(OnegridError):
    """A weight synchronization failed; the old version keeps serving.

    condition  the broken condition of the contract ("C1" .. "C7")
    tensors    canonical names concerned
    """

    def __init__(self, message: str, *, condition: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.condition = condition
        self.tensors = tensors


class MismatchError(OnegridError):
    """Learner and sampler log-probabilities differ where the plan promises equal bits."""


class StoppedError(OnegridError):
    """A signal asked a run to end; it left a checkpoint and can go on."""


class OutOfMemoryError(OnegridError):
    """A device or the host had no memory left; names the settings to lower."""


class CheckpointError(OnegridError):
    """A run directory or checkpoint cannot be read or written."""
