"""The build of the optional C extension, which pyproject.toml cannot declare yet.

Without a C compiler the installation still succeeds. The codecs then run as torch operations, with the same results.
"""

import sys

from setuptools import Extension, setup

setup(
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
