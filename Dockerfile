# megatron_chameleon on NVIDIA's PyTorch image, whose torch, Transformer Engine, Apex and Triton are
# kept as they are. setup.py needs torch 2.9 or newer: release 25.10 of the image, or a later one.
#
#   docker build -t megatron-chameleon .
#   docker run --rm --gpus all --ipc host megatron-chameleon megatron-chameleon doctor
ARG PYTORCH_TAG=26.08-py3
FROM nvcr.io/nvidia/pytorch:${PYTORCH_TAG}

WORKDIR /opt/megatron_chameleon

# With this variable, the image pins packages for every call of pip, some of them to versions that
# setup.py excludes. Only the packages pinned below must be kept.
ENV PIP_CONSTRAINT=

# Pin the image's packages: if a dependency requires another torch, the build fails with pip's message
# instead of replacing it.
RUN python -m pip list --format freeze \
    | grep -iE '^(torch|triton|pytorch-triton|transformer[-_]engine.*|apex|flash[-_]attn)==' \
    | tee /etc/container-pins.txt

# Dependencies are installed first, so that a change of the sources does not install them again.
# --no-build-isolation builds with the image's packages; an isolated build would download others.
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_chameleon/__init__.py megatron_chameleon/__init__.py
COPY megatron_chameleon/parallel/releases.py megatron_chameleon/parallel/releases.py
RUN python -m pip install --no-cache-dir 'setuptools>=77' wheel \
    && python -m pip install --no-cache-dir --no-build-isolation \
       --constraint /etc/container-pins.txt --editable '.[data,eval,hf,plots]'

COPY . .
RUN python -m pip install --no-cache-dir --no-build-isolation --no-deps --editable . \
    && python -m pip list --format freeze | grep -Fxf /etc/container-pins.txt \
    | diff /etc/container-pins.txt - \
    && megatron-chameleon doctor
