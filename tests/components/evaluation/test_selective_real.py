"""The guarantee over 200 random splits of what the real 135M model answers: `tests/benchmarks/risk_guarantee.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_guarantee_holds_on_real_predictions(smollm2_folder: Path) -> None:
    """Of the whole set at either size; of the rest where the calibration part is small beside it. Naively it fails."""
    script = ROOT / "tests" / "benchmarks" / "risk_guarantee.py"
    result = subprocess.run([sys.executable, script, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["n"] == 1500
    rows = {(row["risk"], row["calibration"], row["chosen"]): row for row in found["rows"]}
    for risk in (0.2, 0.3):
        for calibration in (750, 150):
            assert rows[risk, calibration, "guaranteed"]["exceeds"] <= 0.1
            assert rows[risk, calibration, "naive"]["exceeds"] > 0.3
            assert rows[risk, calibration, "guaranteed"]["coverage"] > rows[risk, calibration, "MAPIE"]["coverage"] > 0
        assert rows[risk, 150, "guaranteed"]["exceeds_on_rest"] <= 0.1
        assert rows[risk, 750, "guaranteed"]["found"] == 1.0
