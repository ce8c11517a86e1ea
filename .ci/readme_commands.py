"""Prints the command of the README's n-th bash block, so that CI runs what a newcomer types."""

import pathlib
import re
import sys

readme = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
blocks = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
if len(blocks) != 2:
    sys.exit(f"expected two bash blocks in README.md, found {len(blocks)}")
print(blocks[int(sys.argv[1]) - 1].strip())
