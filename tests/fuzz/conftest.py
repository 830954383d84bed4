"""The modules beside these tests, `fuzzing`, `mutations` and `processes`, are found in every process."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
