#!/usr/bin/env bash
# Installs what a build of the CUDA kernels needs into a manylinux container: tools/install_cuda.sh 13.0
# The containers of manylinux_2_28 are AlmaLinux 8.
set -euo pipefail
version=${1:?usage: tools/install_cuda.sh VERSION}
suffix=${version/./-}
repository=https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
dnf install -y dnf-plugins-core
dnf config-manager --add-repo "$repository"
dnf install -y "cuda-minimal-build-$suffix" "cuda-driver-devel-$suffix"
"/usr/local/cuda-$version/bin/nvcc" --version
