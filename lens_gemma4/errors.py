"""The errors users meet, in one place: the hook system knows nothing of Gemma and the table of names
knows nothing of hooks, and both raise them."""


class HookNameError(KeyError):
    """A hook point that does not exist on this model, or that cannot fire in this call."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class HookShapeError(ValueError):
    """A hook returned another shape, dtype or device than it was given."""


class Unavailable(AttributeError):
    """Something that this checkpoint, or this family, does not have."""
