"""All that pyproject.toml cannot say: a wheel carries `configs/`, which a checkout has at its top.

rlsys.config.shipped finds it in both.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib, "rlsys", "shipped"), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithConfigs})
