"""Words of which a value is one: aliases that mean one of them, and `RolloutMode`, the three modes of a rollout, as a
type for annotations and as names for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BeforeValidator


def aliases(**meanings: str) -> BeforeValidator:
    """Return the part of an `Annotated` type that replaces an alias by the word that it means."""
    return BeforeValidator(lambda word: meanings.get(word, word) if isinstance(word, str) else word)


def meant(kind: Any, word: Any) -> Any:
    """Return what an alias means in such a type; any other value as it is."""
    return get_args(kind)[1].func(word) if get_origin(kind) is Annotated else word


if TYPE_CHECKING:
    RolloutMode = Literal["train", "val", "test"]
    """What a rollout is for: `train` is learned from, `val` measures on the way, `test` at the end."""
else:

    def _with_names(literal: Any) -> Any:
        """Return a `Literal` type that has each mode as an attribute, or the type as it is where Python refuses that.

        The class of such types is no interface of Python's. A later Python that has another one loses these names.
        """
        try:

            class _Modes(type(literal), _root=True):  # `typing` asks whoever subclasses its forms to say so
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
                        f"RolloutMode has no {name!r}: a rollout's mode is 'train' (RolloutMode.TRAINING), 'val' "
                        "(RolloutMode.VALIDATION; Trainer.evaluate uses it) or 'test' (RolloutMode.TEST)"
                    )

                def __reduce__(self) -> str:
                    return "RolloutMode"

            named = _Modes(Literal, get_args(literal))
            named.__module__ = __name__  # where `pickle` finds it
            same = (named, get_origin(named), get_args(named)) == (literal, get_origin(literal), get_args(literal))
        except Exception:  # whatever a later Python raises: the package must be there without the names
            return literal
        return named if same else literal

    RolloutMode = _with_names(Literal["train", "val", "test"])

AnyMode = Annotated[RolloutMode, aliases(eval="val", inference="test")]
"""A mode, or another word for it."""

__all__ = ["AnyMode", "RolloutMode", "aliases", "meant"]
