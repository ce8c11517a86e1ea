"""Prints a command of the README, so that CI runs what a newcomer types."""

import pathlib
import re
import sys

readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
name = sys.argv[1]
blocks = re.findall(rf"<!-- block: {name} -->\n```bash\n(.*?)```", readme, re.DOTALL)
if len(blocks) != 1:
    sys.exit(f"expected one bash block named {name} in README.md, found {len(blocks)}")
print(blocks[0].strip())
