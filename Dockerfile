# dmuon with PyTorch for NVIDIA GPUs, and a C compiler, which Triton needs. Not built yet: there was no machine for it.
#
#   docker build -t dmuon .
#   docker run --rm --gpus all --ipc=host dmuon                                   # dmuon-check --first-run
#   docker run --rm --gpus all --ipc=host dmuon torchrun --standalone --nproc-per-node 8 examples/fsdp2.py
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /dmuon
COPY . .
RUN pip install --no-cache-dir -c constraints.txt .
CMD ["dmuon-check", "--first-run"]
