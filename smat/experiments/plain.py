"""Turn configurations into JSON and back: every field by name, and an unknown one raises."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Union, get_args, get_origin, get_type_hints

HOMES = ("smat.tasks", "smat.models", "smat.training")  # classes that need no module in their name


def everything(field: Field[Any], value: Any) -> bool:
    """Keep every field."""
    return True


def settings(field: Field[Any], value: Any) -> bool:
    """Keep the fields that change a result."""
    return not field.metadata.get("changes_nothing")


def chosen(field: Field[Any], value: Any) -> bool:
    """Keep the fields that change a result and are not at their default."""
    if field.default_factory is not MISSING:
        return settings(field, value) and bool(value != field.default_factory())
    return settings(field, value) and (field.default is MISSING or bool(value != field.default))


def to_plain(value: Any, keep: Callable[[Field[Any], Any], bool] = everything) -> Any:
    """Turn a configuration into what JSON can hold.

    >>> from smat.training import TrainingConfig
    >>> config = TrainingConfig(steps=10, batch_size=4, learning_rate=0.1)
    >>> to_plain(config)["schedule"], to_plain(config, chosen)
    ('constant', {'steps': 10, 'batch_size': 4, 'learning_rate': 0.1})
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value, keep)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(name): to_plain(item, keep) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, keep) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{value!r} cannot be part of a run: a {type(value).__name__} is not plain")


def from_plain(kind: type, plain: Mapping[str, Any]) -> Any:
    """Rebuild a configuration of a class; lists become tuples.

    >>> from smat.training import TrainingConfig
    >>> from_plain(TrainingConfig, {"steps": 10, "batch_size": 4, "lr": 0.1})
    Traceback (most recent call last):
    ValueError: TrainingConfig has no field 'lr'; it has steps, batch_size, learning_rate, ...
    """
    known = {field.name: field for field in fields(kind) if field.init}
    for name in plain:
        if name not in known and name != "class":
            raise ValueError(f"{kind.__name__} has no field {name!r}; it has {', '.join(known)}")
    for name, field in known.items():
        if name not in plain and not _has_default(field):
            raise ValueError(f"{kind.__name__} needs the field {name!r}")
    hints = get_type_hints(kind)
    return kind(**{name: _value(hints[name], plain[name]) for name in known if name in plain})


def name_of(kind: type) -> str:
    """Name a class so that `find_class` finds it: briefly if it is one of the package's.

    >>> from smat.training import TrainingConfig
    >>> name_of(TrainingConfig)
    'TrainingConfig'
    """
    for home in HOMES:
        if getattr(_module(home), kind.__name__, None) is kind:
            return kind.__name__
    return f"{kind.__module__}:{kind.__name__}"


def find_class(name: str) -> type:
    """Find a task's or a model's configuration by its name, or by "module:Name" for one's own."""
    home, _, short = name.rpartition(":")
    for module in (home,) if home else HOMES:
        found = getattr(_module(module), short, None)
        if isinstance(found, type) and is_dataclass(found):
            return found
    raise ValueError(f"there is no task or model configuration {name!r}")


def disagreement(old: Any, new: Any, name: str = "") -> str | None:
    """Say where two plain configurations differ, in fields that both have.

    >>> disagreement({"steps": 10, "new": 1}, {"steps": 20})
    'steps was 10 and is 20'
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in old:
            if key in new:
                found = disagreement(old[key], new[key], f"{name}.{key}".lstrip("."))
                if found:
                    return found
        return None
    return None if old == new else f"{name} was {old!r} and is {new!r}"


def _plain_fields(value: Any, keep: Callable[[Field[Any], Any], bool]) -> dict[str, Any]:
    hints = get_type_hints(type(value))
    plain: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if not (field.init and keep(field, item)):
            continue
        plain[field.name] = to_plain(item, keep)
        if is_dataclass(item) and _declared(hints[field.name]) is not type(item):
            plain[field.name] = {"class": name_of(type(item)), **plain[field.name]}
    return plain


def _value(hint: Any, plain: Any) -> Any:
    if isinstance(plain, list):
        return tuple(_value(None, item) for item in plain)
    if isinstance(plain, Mapping):
        declared = _declared(hint)
        if declared is not None:
            return from_plain(declared, plain)
        if "class" in plain and _names_a_class(hint):
            return from_plain(find_class(plain["class"]), plain)
    return plain


def _names_a_class(hint: Any) -> bool:
    """A field that may hold any configuration says which; a mapping of options never does."""
    return not (isinstance(get_origin(hint), type) and issubclass(get_origin(hint), Mapping))


def _declared(hint: Any) -> type | None:
    """Return the dataclass that a field is declared to hold, if it is one."""
    if get_origin(hint) in (Union, types.UnionType):
        found = [kind for part in get_args(hint) if (kind := _declared(part)) is not None]
        return found[0] if len(found) == 1 else None
    return hint if isinstance(hint, type) and is_dataclass(hint) else None


def _has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ValueError(f"module {name!r} is not there, so its classes cannot be found") from None
