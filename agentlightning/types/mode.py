"""`RolloutMode`: the three modes of a rollout, as a type for annotations and as names for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    RolloutMode = Literal["train", "val", "test"]
    """What a rollout is for: `train` is learned from, `val` measures on the way, `test` at the end."""
else:

    class _Modes(type(Literal["train"]), _root=True):  # `typing` asks whoever subclasses its forms to say so
        """The `Literal` type of the modes, with each mode as an attribute: `RolloutMode.TRAINING` is `"train"`."""

        TRAIN: Final = "train"
        TRAINING: Final = "train"
        VAL: Final = "val"
        VALIDATION: Final = "val"
        TEST: Final = "test"
        TESTING: Final = "test"

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                return super().__getattr__(name)
            raise AttributeError(
                f"RolloutMode has no {name!r}: a rollout's mode is 'train' (RolloutMode.TRAINING), 'val' "
                "(RolloutMode.VALIDATION; Trainer.evaluate uses it) or 'test' (RolloutMode.TEST)"
            )

        def __reduce__(self) -> str:
            return "RolloutMode"

    RolloutMode = _Modes(Literal, get_args(Literal["train", "val", "test"]))
    RolloutMode.__module__ = __name__  # where `pickle` finds it

__all__ = ["RolloutMode"]
