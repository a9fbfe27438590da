"""The one thing pyproject.toml cannot say yet: an extension that may fail to build.

Without a C compiler the installation succeeds and the codecs run as torch operations, with the same results.
"""

import sys

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "diloco.algorithm.codec._kernels",
            sources=["src/diloco/algorithm/codec/_kernels.c"],
            # never fused: kernels and torch operations agree bit for bit; no -march: one build serves every CPU
            extra_compile_args=["/O2"] if sys.platform == "win32" else ["-O3", "-ffp-contract=off"],
            optional=True,
        )
    ],
)
