"""The one part of the build that pyproject.toml has no stable word for: a small compiled loop.

Without a compiler kvferry installs all the same and copies with numpy, slower.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvferry.transports.copy._copy",
            ["src/kvferry/transports/copy/_copy.c"],
            extra_compile_args=["-O3"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    # The module keeps to the stable ABI, so one wheel serves Python 3.11 and newer.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
