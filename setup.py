"""What pyproject.toml can't say: conf/ and experiments/ beside the package belong to it."""

from setuptools import find_packages, setup

DATA = {"sarathi_lab.conf": "conf", "sarathi_lab.experiments": "experiments"}

setup(
    packages=[*find_packages(include=["sarathi_lab*"]), *find_packages("kernels"), *DATA],
    package_dir={"sarathi_kernels": "kernels/sarathi_kernels", **DATA},
)
