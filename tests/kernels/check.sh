#!/usr/bin/env bash
# Compiles harness.c with every compiler, instruction set and sanitizer that this machine has, and runs it. What is
# not installed is skipped, and named. Debian: apt-get install gcc clang libomp-dev libclang-rt-dev (the sanitizers of
# clang) gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
set -euo pipefail
cd "$(dirname "$0")"
export OMP_WAIT_POLICY=passive  # threads that spin only slow each other down: there are more of them than processors
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
echo leak:libomp > "$built/leaks"  # clang's own, at its end
export LSAN_OPTIONS="suppressions=$built/leaks:print_suppressions=0"
sanitized=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all)

has() { command -v "$1" >/dev/null; }

links() {  # compiler, flags...: whether a program can be linked with them
  echo "int main(void) { return 0; }" | "$1" -x c - "${@:2}" -fopenmp -o "$built/links" 2>/dev/null
}

compile() {  # output, compiler, flags...
  "$2" -Wall -Wextra -Wno-pass-failed -ffp-contract=off -fopenmp -I../../treespec/kernels harness.c -o "$1" "${@:3}"
}

check() {  # name, compiler, flags...; the kernels must compile, and what they promise must hold
  local file="$built/${1//[^a-z0-9]/_}" run=()
  [[ $2 == aarch64* ]] && run=(qemu-aarch64 -L /usr/aarch64-linux-gnu)
  compile "$file" "${@:2}" -lm && said=$("${run[@]}" "$file" 2>&1) || { echo "FAILED $1"; echo "${said:-}" | head -40; return 1; }
  echo "$1: $said"
}

compiles() {  # as check, for instruction sets that this processor may lack
  compile "$built/${1//[^a-z0-9]/_}.o" "${@:2}" -c && echo "$1: compiles"
}

# Instruction sets that this processor runs, the best of them last; the others are only compiled.
levels=(native)
others=()
if [[ $(uname -m) == x86_64 ]]; then
  flags=" $(grep -m1 '^flags' /proc/cpuinfo) "
  levels=(x86-64-v2)
  [[ $flags == *" avx2 "* && $flags == *" fma "* ]] && levels+=(x86-64-v3) || others+=(x86-64-v3)
  [[ $flags == *" avx512vl "* && $flags == *" avx512dq "* ]] && levels+=(x86-64-v4) || others+=(x86-64-v4)
  [[ $flags == *" amx_bf16 "* ]] && levels+=(sapphirerapids) || others+=(sapphirerapids)
  [[ $flags == *" avx_vnni "* && $flags != *" avx512f "* ]] && levels+=(alderlake) || others+=(alderlake)
fi
best=${levels[-1]}

jobs=()
for compiler in gcc clang; do
  has $compiler || { echo "skipped $compiler: not installed"; continue; }
  links $compiler || { echo "skipped $compiler: it has no OpenMP (Debian: libomp-dev)"; continue; }
  jobs+=("check '$compiler $best' $compiler -march=$best -O3")
  # As an installation builds them: with the processor's own instructions, which no level may have all of.
  [[ $best == native ]] || jobs+=("check '$compiler native' $compiler -march=native -O3")
  for level in "${others[@]}"; do jobs+=("compiles '$compiler $level' $compiler -march=$level -O1"); done
  [[ $compiler == gcc ]] && jobs+=("check 'gcc unsigned weights' gcc -march=${levels[0]} -O2 -DEIGHTS_UNSIGNED")
  links $compiler "${sanitized[@]}" || { echo "skipped the sanitizers of $compiler: not installed"; continue; }
  for level in "${levels[@]}"; do
    jobs+=("check '$compiler $level sanitized' $compiler -march=$level ${sanitized[*]}")
  done
done
if has aarch64-linux-gnu-gcc && has qemu-aarch64; then
  jobs+=("check 'gcc aarch64' aarch64-linux-gnu-gcc -O2")
  jobs+=("check 'gcc aarch64 dotprod' aarch64-linux-gnu-gcc -O2 -march=armv8.2-a+dotprod")
  jobs+=("check 'gcc aarch64 i8mm' aarch64-linux-gnu-gcc -O2 -march=armv8.2-a+dotprod+i8mm")
elif [[ $(uname -m) != aarch64 ]]; then
  echo "skipped aarch64: aarch64-linux-gnu-gcc and qemu-aarch64 are not both installed"
fi

export -f check compiles compile
export built
printf '%s\0' "${jobs[@]}" | xargs -0 -P "$(nproc)" -I{} bash -c '{}'
