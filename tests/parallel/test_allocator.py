"""The C library's allocator: what a command does to it, what it leaves alone, and that nothing is done unasked.

Pages that a process touches for the first time are counted, so that nothing here depends on how fast a machine is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
from memory_pages import MIB, PAGES, new_pages

from domainpar.parallel import allocator
from domainpar.parallel.allocator import give_back_freed, set_up_allocator
from domainpar.testing import find_mpiexec, run_ranks

on_glibc = pytest.mark.skipif(allocator._glibc() is None, reason="another C library than glibc")
KEPT = "freed memory is kept for the next step (glibc "
OTHER_MALLOC = """
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
static char *next, *end;
static size_t lock;
void *memalign(size_t boundary, size_t size) {
    while (__sync_lock_test_and_set(&lock, 1)) {}
    if (!next) {
        next = mmap(0, 1ul << 36, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (boundary < 16) boundary = 16;
    char *block = (char *)(((size_t)next + 16 + boundary - 1) / boundary * boundary);
    ((size_t *)block)[-1] = size;
    next = block + size;
    __sync_lock_release(&lock);
    return block;
}
void *malloc(size_t size) { return memalign(16, size); }
void *aligned_alloc(size_t boundary, size_t size) { return memalign(boundary, size); }
int posix_memalign(void **block, size_t boundary, size_t size) { *block = memalign(boundary, size); return 0; }
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void free(void *block) {}
void *realloc(void *old, size_t size) {
    void *block = malloc(size);
    if (old) {
        size_t had = ((size_t *)old)[-1];
        memcpy(block, old, had < size ? had : size);
    }
    return block;
}
"""
COUNTING_MALLOC = """
void *__libc_malloc(unsigned long size);
void *malloc(unsigned long size) { return __libc_malloc(size); }
"""
SILENT_IMPORTS = "import domainpar, domainpar.train, domainpar.infer, domainpar.parallel.allocator; print('imported')"


def in_a_process(
    statement="print(set_up_allocator({how!r}))", how="keep", in_thread=False, python=sys.executable, **environment
):
    """What a fresh process says when it sets the allocator up, and the new pages of a block it uses afterwards."""
    program = [
        "from domainpar.parallel.allocator import set_up_allocator",
        statement.format(how=how),
        f"from memory_pages import new_pages; print(new_pages({in_thread}))",
    ]
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    done = subprocess.run(
        [python, "-c", "\n".join(program)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    said, pages = done.stdout.splitlines()
    return said, int(pages)


@on_glibc
@pytest.mark.parametrize("in_thread", [False, True], ids=["main thread", "another thread"])
def test_memory_that_was_freed_is_used_again_without_touching_a_new_page(in_thread):
    said, pages = in_a_process(in_thread=in_thread)
    assert said.startswith(KEPT)
    assert pages < PAGES / 100


@pytest.mark.parametrize("statement", ["print(set_up_allocator('system'))", SILENT_IMPORTS], ids=["system", "imports"])
@on_glibc
def test_nothing_is_changed_unasked(statement):
    said, pages = in_a_process(statement)
    assert "--allocator system" in said or said == "imported"
    assert pages >= PAGES


OWN = {
    "variables": ({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}, "MALLOC_ARENA_MAX, MALLOC_TRIM_THR"),
    "tunables": ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "GLIBC_TUNABLES set in the environment"),
}


@on_glibc
@pytest.mark.parametrize(("environment", "named"), OWN.values(), ids=OWN)
@pytest.mark.slow
def test_what_the_user_has_set_is_left_alone_and_named(environment, named):
    said, pages = in_a_process(**environment)
    assert said.startswith("left as it is: ")
    assert named in said
    assert pages >= PAGES


@on_glibc
@pytest.mark.slow
def test_other_tunables_and_libraries_that_bring_no_malloc_are_no_reason():
    other = {"GLIBC_TUNABLES": "glibc.rtld.nns=5", "LD_PRELOAD": find_library("m") or ""}
    assert in_a_process(**other)[0].startswith(KEPT)


def preloaded(tmp_path, source, name):
    """A library made of some C."""
    (tmp_path / "other.c").write_text(source)
    library = tmp_path / name
    subprocess.run(["cc", "-shared", "-fPIC", "-fno-builtin", "-o", library, tmp_path / "other.c"], check=True)
    return str(library)


@on_glibc
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_another_malloc_that_was_loaded_first_is_left_alone_and_named(tmp_path):
    said, pages = in_a_process(LD_PRELOAD=preloaded(tmp_path, OTHER_MALLOC, "libothermalloc.so"))
    assert "LD_PRELOAD" in said
    assert pages >= PAGES


@on_glibc
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.slow
def test_a_malloc_that_asks_glibcs_is_set_up_since_that_takes_effect(tmp_path):
    said, pages = in_a_process(LD_PRELOAD=preloaded(tmp_path, COUNTING_MALLOC, "libcounting.so"))
    assert said.startswith(KEPT)
    assert pages < PAGES / 100


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda: None)
    assert "not glibc" in set_up_allocator()
    give_back_freed()


@on_glibc
def test_what_the_library_refuses_is_not_claimed(monkeypatch):
    monkeypatch.setattr(allocator, "_KEEP", {"fast bins of a megabyte": (1, MIB), "one arena": (-8, 1)})
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    said = set_up_allocator()
    assert said.startswith("set up in part (glibc ")
    assert said.endswith(": one arena)")


@on_glibc
def test_memory_that_is_kept_can_be_given_back():
    statement = (
        "import psutil; from memory_pages import use_a_block\n"
        "from domainpar.parallel.allocator import give_back_freed\n"
        "held = lambda: psutil.Process().memory_info().rss // 2**20\n"
        "set_up_allocator(); before = held(); use_a_block(); kept = held(); give_back_freed()\n"
        "print(kept - before, held() - before)"
    )
    kept, left = map(int, in_a_process(statement)[0].split())
    assert kept >= 60
    assert left <= 4


def pages_of_a_rank(world):
    return set_up_allocator(), new_pages()


@on_glibc
@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec or no mpi4py")
@pytest.mark.slow
def test_every_rank_of_mpiexec_keeps_its_memory():
    found = run_ranks(pages_of_a_rank, 2, transport="mpi")
    assert all(said.startswith(KEPT) and pages < PAGES / 100 for said, pages in found)


def test_it_needs_no_torch():
    program = "import sys, domainpar.parallel.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
