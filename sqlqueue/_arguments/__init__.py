"""
The arguments of a job: from a call to a JSON payload, and back to a call.
"""

from __future__ import annotations

from sqlqueue._arguments.annotations import Sensitive
from sqlqueue._arguments.contract import JSON, check_json, from_json, to_json
from sqlqueue._arguments.shapes import Shape, is_shaped
from sqlqueue._arguments.signature import Signature

__all__ = ["JSON", "Sensitive", "Shape", "Signature", "check_json", "from_json", "is_shaped", "to_json"]
