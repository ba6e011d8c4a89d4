"""What the settings of a training are made of: fields that take what forms and files give, and one kind of model."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints


def _unwrap_ui_json(value: Any) -> Any:
    """Return the dict that Prefect's V2 UI sends as ``{"__prefect_kind": "json", "value": "<text>"}``."""
    if isinstance(value, dict) and value.get("__prefect_kind") == "json":
        value = value.get("value")
    if isinstance(value, str):
        text = value.strip()
        if not text:
            return {}
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"expected a JSON object such as {{}}, got {text[:80]!r} (line {error.lineno}: {error.msg})"
            ) from None
    return value


def _no_boolean(value: Any) -> Any:
    """Refuse booleans, which pydantic would take for 0 and 1."""
    if isinstance(value, bool):
        raise ValueError("expected a whole number, got a boolean")
    return value


#: Behind the bounds of a number, or the forms would not know them.
WHOLE = BeforeValidator(_no_boolean)

Count = Annotated[int, WHOLE]
JsonDict = Annotated[dict[str, Any], BeforeValidator(_unwrap_ui_json)]
Amounts = Annotated[dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]], BeforeValidator(_unwrap_ui_json)]
Labels = Annotated[dict[str, str], BeforeValidator(_unwrap_ui_json)]
Text = Annotated[str, StringConstraints(strip_whitespace=True)]


class SettingsModel(BaseModel):
    """Base of the settings."""

    # A misspelt field is an error, and Prefect's server needs it to accept an all-default block as a parameter.
    model_config = ConfigDict(extra="forbid")
