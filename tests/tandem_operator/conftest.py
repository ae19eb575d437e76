from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # `operator_objects`, shared by the tests of this folder

settings.register_profile("busy", deadline=None)  # how long an example takes says more about the machine than the code
settings.load_profile("busy")
