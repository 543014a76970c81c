"""Where the bundled model is."""

from pathlib import Path

DEMO_MODEL = Path(__file__).parent / "demo"
