#!/usr/bin/env bash
# Shared libraries under the checkers that C programs have: compilers with all warnings, AddressSanitizer and UndefinedBehaviorSanitizer,
# and valgrind. Usage: tests/libraries.sh [GRISTMILL], by default the release program of this checkout. Not a part of .ci/run: valgrind
# takes minutes, and a static or stripped runner of another machine may lack the tools.
set -euo pipefail
cd "$(dirname "$0")/.."
gristmill=$(realpath "${1:-target/release/gristmill}")
data=$PWD/tests/data
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

compile_all() {
    "$gristmill" compile "$data/digits/model.onnx" --shape batch=1,8 "$@" -o libdigits.so
    "$gristmill" compile "$data/c/counter.ir" "$@" -o libcounter.so
    "$gristmill" compile "$data/c/wide.ir" "$@" -o libwide.so
}
compile_all

failed=0
# step NAME PROGRAM COMMAND..: runs it, if the program is there.
step() {
    local name=$1 program=$2
    shift 2
    if ! command -v "$program" > /dev/null; then
        echo "$name: left out, there is no $program"
        failed=1
    elif "$@" > log 2>&1; then
        echo "$name: ok"
    else
        cat log
        echo "$name: failed"
        failed=1
    fi
}

strict=(-Wall -Wextra -Werror -pedantic -I. "$data/c/use.c" -x none)
linked=(-L. -ldigits -lcounter -lwide -lpthread '-Wl,-rpath,$ORIGIN')
checked=(-g -fsanitize=address,undefined -fno-sanitize-recover=all)
build_and_run() {
    local compiler=$1 runs=$2
    shift 2
    "$compiler" "$@" "${linked[@]}" -o use && ./use "$runs"
}
for compiler in gcc clang; do
    step "$compiler, C99" "$compiler" build_and_run "$compiler" 1000 -std=c99 "${strict[@]}"
    step "$compiler, C99 with sanitizers" "$compiler" build_and_run "$compiler" 100 -std=c99 "${checked[@]}" "${strict[@]}"
done
for compiler in g++ clang++; do
    step "$compiler, C++11" "$compiler" build_and_run "$compiler" 100 -std=c++11 -x c++ "${strict[@]}"
done
under_valgrind() {
    # Valgrind knows instructions up to AVX2.
    compile_all --target-cpu x86-64-v3
    gcc -g -std=c99 "${strict[@]}" "${linked[@]}" -o use
    valgrind --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite,indirect,possible ./use 2 without-fork
}
step "valgrind" valgrind under_valgrind
exit $failed
