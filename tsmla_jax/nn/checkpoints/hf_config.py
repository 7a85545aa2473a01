"""Fields of a Hugging Face `config.json`, read and checked one by one."""

import errno
import json
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tsmla_jax.nn.checkpoints.mistral_params import hf_fields
from tsmla_jax.nn.yarn import YarnConfig

MISTRAL_NAME = "params.json"
"""The config in Mistral's own checkpoints."""
_ABSENT: Any = object()


def why_no_file(path: Path, missing: str) -> str | None:
    """The reason why a path is no regular file (reading a named pipe may wait for ever); None if it is one.

    Args:
        path: the path.
        missing: the reason if there is nothing at the path.
    """
    try:
        if path.is_file():
            return None
        return "not a regular file" if path.exists() else missing
    except OSError as error:  # a name that is too long, a folder that may not be searched
        return f"cannot be read: {error.strerror}"


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: it is no regular file (reading a named pipe may wait for ever), or can't be read.
        ValueError: it isn't JSON in UTF-8, is nested too deeply, or gives a name two different values.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; ValueError if a name has two different values, of which Python's reader would keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        # Compared as texts, because 1 == True.
        if name in found and repr(found[name]) != repr(value):
            raise ValueError(f"{name!r} has two values, {found[name]!r:.60} and {value!r:.60}")
        found[name] = value
    return found


def read_hf_config(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """The fields of a Hugging Face config, and a name for it in error texts.

    Args:
        source: a mapping (returned as it is), or the path of a `config.json`, of Mistral's `params.json`, or of the
            folder that holds one of them; `config.json` comes first.

    Raises:
        ValueError: there is no such file, it can't be read, it holds no JSON object, or `hf_fields` refuses a
            `params.json`; names the file.
        TypeError: source is neither a mapping, a str nor a Path.
    """
    if isinstance(source, Mapping):
        return source, "config"
    if not isinstance(source, str | Path):
        legal = "a mapping, or the path of a config.json or of its folder"
        raise TypeError(f"source: got {type(source).__name__}; legal: {legal}")
    path = Path(source)
    try:
        if path.is_dir():
            own = path / MISTRAL_NAME
            path = path / "config.json"
            path = own if not os.path.lexists(path) and own.is_file() else path
        fields = read_json(path)
    except FileNotFoundError:
        raise ValueError(
            f"{path}: cannot read the config: no such file; legal: the path of a config.json or of its folder (nothing"
            " is downloaded)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot read the config: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(fields).__name__}")
    return hf_fields(fields, str(path)) if path.name == MISTRAL_NAME else fields, str(path)


def read_optional_config(path: Path) -> tuple[Mapping[str, Any], str]:
    """The fields of a config file as `read_hf_config` reads them; no fields if nothing has this name. A broken link
    is refused."""
    return read_hf_config(path) if os.path.lexists(path) else ({}, str(path))


def hf_field(
    fields: Mapping[str, Any],
    name: str,
    kind: type,
    where: str,
    *,
    default: Any = _ABSENT,
    nullable: bool = False,
) -> Any:
    """One field of a Hugging Face config, checked.

    Args:
        fields: the config's fields.
        name: the field's name.
        kind: int, float, bool, str or dict; an integer counts as a float, a bool never as a number.
        where: the config's name in an error.
        default: the value of an absent field (or a null one, unless nullable); without it the field is required.
        nullable: null is legal and returned as None. The field must still be present unless it has a default.

    Raises:
        ValueError: the field is missing, of another type or an integer past float64; names `where` and the field.
    """
    value: Any = fields.get(name, _ABSENT)
    if value is None and nullable:
        return None
    if value is _ABSENT or (value is None and default is not _ABSENT):
        if default is _ABSENT:
            raise ValueError(f"{where}: field {name!r} is missing")
        return default
    legal: Any = (int, float) if kind is float else kind
    if not isinstance(value, legal) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: field {name!r} must be {kind.__name__}, got {value!r}")
    try:
        return float(value) if kind is float else value
    except OverflowError:
        raise ValueError(f"{where}: field {name!r} must be float, got an integer past float64") from None


# Keys that are not yarn's own, and the values that each may have: those that change nothing.
_ROPE_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "apply_yarn_scaling": (True,),
    "attn_factor": (1,),
    "extrapolation_factor": (1,),
    "llama_4_scaling_beta": (0,),
    "partial_rotary_factor": (1,),
    "truncate": (True,),
}
_YARN_NUMBERS = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "attention_factor": None}
# "finetuned" says how the weights were made.
_ROPE_KEYS = ("finetuned", "rope_theta", "rope_type", "factor", "original_max_position_embeddings", *_YARN_NUMBERS)


class RopeFields(NamedTuple):
    """A config's rope: base of the angles, yarn or None, and all keys by their names in the new spelling."""

    theta: float
    yarn: YarnConfig | None
    keys: Mapping[str, Any]


def rope_fields(fields: Mapping[str, Any], where: str, *, known: Collection[str] = ()) -> RopeFields:
    """rope_theta and yarn, from the old spelling (rope_theta, rope_scaling), the new one (rope_parameters), or both.

    transformers 5 writes rope_parameters, sometimes next to the old fields. Where both are present they must agree: a
    silent choice between two angles, or a key that is passed over, would make a model that is subtly wrong.

    Args:
        fields: the config's fields.
        where: the config's name in an error.
        known: keys that are legal beside yarn's own. Their values are not checked here, except that a
            max_position_embeddings among them must be the model's.

    Raises:
        ValueError: a field is missing, of another type or out of its range; two disagree; the rope type is neither
            default nor yarn; or a key says something that is not computed here.
    """
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}

    def take(source: str, key: str, value: Any) -> None:
        if value is None:
            return
        if key in merged and merged[key] != value:
            raise ValueError(f"{where}: fields {origin[key]!r} and {source!r} disagree: {merged[key]!r} and {value!r}")
        merged[key], origin[key] = value, source

    repeated = ("max_position_embeddings",) if "max_position_embeddings" in known else ()
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", *repeated):
        take(name, name, fields.get(name))
    for group in ("rope_scaling", "rope_parameters"):
        values = hf_field(fields, group, dict, where, default=None)
        for key, value in (values or {}).items():
            # "type" is the older spelling of "rope_type".
            take(f"{group}.{key}", "rope_type" if key == "type" else key, value)

    theta = hf_field(merged, "rope_theta", float, where)
    if not math.isfinite(theta):
        raise ValueError(f"{where}: {origin['rope_theta']}: got {theta}; legal: a finite number")
    kind = hf_field(merged, "rope_type", str, where, default="default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"{where}: field {origin['rope_type']!r} must be 'default' or 'yarn', got {kind!r}")
    for key, value in merged.items():
        if key not in (*_ROPE_KEYS, *known) and value not in _ROPE_DEFAULTS.get(key, ()):
            legal = ", ".join(map(repr, (*_ROPE_DEFAULTS.get(key, ()), None)))
            raise ValueError(f"{where}: {origin[key]}: got {value!r:.60}; legal: {legal}")
    if kind == "default":
        for key in ("factor", "attention_factor"):
            if merged.get(key, 1) != 1:
                raise ValueError(
                    f"{where}: {origin[key]}: got {merged[key]!r:.60}; legal: 1 or None with rope_type 'default'"
                )
        return RopeFields(theta, None, merged)
    group_name = f"{where}: {origin['rope_type'].split('.')[0]}"
    factor = hf_field(merged, "factor", float, group_name)
    numbers = {
        name: hf_field(merged, name, float, group_name, default=number) for name, number in _YARN_NUMBERS.items()
    }
    original_len = hf_field(merged, "original_max_position_embeddings", int, group_name)
    try:
        yarn = YarnConfig(factor=factor, original_max_position_embeddings=original_len, **numbers)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return RopeFields(theta, yarn, merged)
