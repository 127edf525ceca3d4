"""What the README shows first runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_python_lines_run_as_they_stand(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks[0].strip().splitlines()) <= 6
    code = "".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 stages on 2 ranks" in done.stdout
    assert re.search(r"step 0: loss \d\.\d+, 64 samples", done.stdout)
    assert float(done.stdout.splitlines()[-1]) > 1.2  # offload, on batch norm and ReLU


def test_what_the_readme_points_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert target.startswith("http") or (README.parent / target).exists(), target
