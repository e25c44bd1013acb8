# Runs `make artifact` without anything installed: make image, then docker run -v "$PWD/outputs:/lab/outputs" sarathi-lab
# (docs/how-to/artifact.md). For a GPU: make image TORCH_INDEX=https://download.pytorch.org/whl/cu130, then docker run --gpus all ...
FROM python:3.11-slim
# The compiler builds the CPU's kernels and what Triton launches; git names the commit.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /lab
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt .
RUN python -m pip install --no-cache-dir --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch
COPY . .
RUN git config --global --add safe.directory /lab
RUN python -m pip install --no-cache-dir --constraint constraints.txt --editable .
ENTRYPOINT ["python", "-m", "sarathi_lab"]
CMD ["claims", "--run", "--simulate", "--resume", "--seconds", "3000", "--results", "outputs/artifact"]
