# Training in a container. docs/docker.md has the lines to type, and says what of this nobody has built or run yet.
#
#   docker build -t spotrl --build-arg REVISION="$(git describe --always --dirty --abbrev=40 --exclude='*')" .
#
# With --build-arg RAY=yes it is a node of a Ray cluster too (docs/cluster.md).
#
# This tag's torch is the one of requirements.txt. V100, and drivers older than 580: docs/docker.md has the tags.
ARG TAG=2.13.0-cuda13.0-cudnn9-runtime
FROM pytorch/pytorch:${TAG}

# g++ and Python's headers: --compile builds code when it starts, and a runtime image promises no compiler. The others draw
# MuJoCo's pictures without a screen, in software. No versions: a distribution's archive keeps only the newest.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    g++ libegl1 libgl1 libgl1-mesa-dri python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace

# Before the source, so that this layer is built again only when a version changes. The image's torch stays: pip may
# take no other, and what stands there afterwards is compared. s3fs is for --mirror s3://; the other lines of
# requirements-cloud.txt are for tests. The image is the environment: its Python is marked as the distribution's own
# (PEP 668), hence --break-system-packages.
COPY requirements.txt requirements-cloud.txt requirements-ray.txt ./
ARG RAY
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > torch.txt \
    && grep -v '^torch==' requirements.txt > others.txt \
    && grep '^s3fs==' requirements-cloud.txt >> others.txt \
    && if [ -n "$RAY" ]; then grep -v '^#' requirements-ray.txt >> others.txt; fi \
    && python -m pip install --no-cache-dir --break-system-packages --constraint torch.txt --requirement others.txt \
    && python -c "import torch; was = open('torch.txt').read().strip(); assert was == 'torch==' + torch.__version__, was" \
    && rm torch.txt others.txt

# a step of an Atari game, whose ROM comes with ale-py, and one of MuJoCo
RUN python -c "import ale_py, gymnasium; env = gymnasium.make('ALE/Breakout-v5'); env.reset(); env.step(0)" \
    && python -c "import gymnasium as g; env = g.make('HalfCheetah-v5'); env.reset(); env.step(env.action_space.sample())"

COPY . .
# Whatever the umask of the checkout was, and whoever --user names: all may read, and write where results go.
RUN chmod -R a+rX . && install -d -m 1777 runs benchmark/out

# There is no git in here: config.json takes its revision from this. Last, because it changes with each commit.
ARG REVISION
# A user whom the image doesn't know has neither a HOME, below which Triton and matplotlib keep their caches, nor a name,
# for which Python's getpass looks here first.
# A Ray node without a token does not start.
ENV SPOTRL_REVISION=${REVISION} HOME=/tmp USER=spotrl PYTHONUNBUFFERED=1 RAY_AUTH_MODE=token

# A number: the base image may have a user 1000 or none, and Kubernetes can see that it is not root.
USER 1000:1000

# No shell in between: Python is the first process and gets the signals.
STOPSIGNAL SIGTERM
ENTRYPOINT ["python"]
CMD ["ppo_atari.py", "--help"]
