"""One format, whoever speaks."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import logging
from servekit.runtime import logs
logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
logs.configure("servekit::http[3]", 7, "info", {form!r})
logging.getLogger("servekit.x").debug("not shown")
logging.getLogger("servekit.x").info("shown %d", 5)
logging.getLogger("uvicorn.error").warning("joined")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("servekit.x").exception("broken")
"""


def lines(form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CODE.format(form=form)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout == ""
    return done.stderr.splitlines()


def test_text_names_process_epoch_and_pid():
    first, second, third, *traceback = lines("text")
    assert " INFO    servekit::http[3] epoch=7 pid=" in first and first.endswith("shown 5")
    assert " WARNING servekit::http[3]" in second and second.endswith("joined")
    assert third.endswith("broken") and traceback[-1] == "ZeroDivisionError: division by zero"


def test_json_is_one_object_a_line():
    first, second, third = map(json.loads, lines("json"))
    assert first["message"] == "shown 5" and first["level"] == "info" and first["title"] == "servekit::http[3]"
    assert first["epoch"] == 7 and first["pid"] > 0
    assert second["logger"] == "uvicorn.error"
    assert "ZeroDivisionError" in third["message"]
