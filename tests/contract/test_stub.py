"""`_core.pyi` says what the compiled module has: every name, every signature, and nothing else."""

import subprocess
import sys


def test_stub_and_module_agree():
    check = [sys.executable, "-m", "mypy.stubtest", "servekit._core", "--concise"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
