"""What pyproject.toml can't declare: the optional C extension, and the links of the README on PyPI.

Without a C compiler the installation still succeeds. The codecs then run as torch operations, with the same results.
"""

import re
import sys
from pathlib import Path

from setuptools import Extension, setup

HOME = ""  # the address of the repository's files, ending in "/"; while there is none, links to files become plain text
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=LINK.sub(rf"\1[\2]({HOME}\3)" if HOME else r"\2", README),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "diloco.algorithm.codec._kernels",
            sources=["src/diloco/algorithm/codec/_kernels.c"],
            # no fused multiply-add, so that kernels and torch operations agree bit for bit; no -march, so that one
            # build runs on every CPU
            extra_compile_args=["/O2"] if sys.platform == "win32" else ["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
