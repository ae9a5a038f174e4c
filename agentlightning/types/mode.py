"""`RolloutMode`, the three modes of a rollout, as a type for annotations and as names. Also aliases of words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BeforeValidator


def aliases(**meanings: str) -> BeforeValidator:
    """Return a validator for an `Annotated` type that replaces an alias by its meaning."""
    return BeforeValidator(lambda word: meanings.get(word, word) if isinstance(word, str) else word)


def meant(kind: Any, word: Any) -> Any:
    """Return the meaning of an alias in a type with `aliases`, or any other value unchanged."""
    return get_args(kind)[1].func(word) if get_origin(kind) is Annotated else word


if TYPE_CHECKING:
    RolloutMode = Literal["train", "val", "test"]
    """Purpose of a rollout: `train` for training, `val` for validation during training, `test` for the final test."""
else:

    def _with_names(literal: Any) -> Any:
        """Return a `Literal` type with each mode as an attribute, or the type unchanged if Python does not allow it.

        The class of `Literal` types is not a public interface of Python, so a later version may not have these names.
        """
        try:

            class _Modes(type(literal), _root=True):  # `typing` requires it of subclasses of its forms
                """The `Literal` type of the modes, with each mode as an attribute: `RolloutMode.TRAINING`."""

                TRAIN: Final = "train"
                TRAINING: Final = "train"
                VAL: Final = "val"
                VALIDATION: Final = "val"
                EVAL: Final = "val"
                EVALUATION: Final = "val"
                TEST: Final = "test"
                TESTING: Final = "test"
                INFERENCE: Final = "test"

                def __getattr__(self, name: str) -> Any:
                    if name.startswith("_"):
                        return super().__getattr__(name)
                    raise AttributeError(
                        f"RolloutMode has no {name!r}. Use 'train' (RolloutMode.TRAINING), 'val' "
                        "(RolloutMode.VALIDATION; Trainer.evaluate uses it) or 'test' (RolloutMode.TEST)."
                    )

                def __reduce__(self) -> str:
                    return "RolloutMode"

            modes = _Modes(Literal, get_args(literal))
            modes.__module__ = __name__  # where `pickle` finds it
            same = (modes, get_origin(modes), get_args(modes)) == (literal, get_origin(literal), get_args(literal))
        except Exception:  # any error of a later Python: the package must import without the names
            return literal
        return modes if same else literal

    RolloutMode = _with_names(Literal["train", "val", "test"])

AnyMode = Annotated[RolloutMode, aliases(eval="val", inference="test")]
"""A mode, or an alias of one."""

__all__ = ["AnyMode", "RolloutMode", "aliases", "meant"]
