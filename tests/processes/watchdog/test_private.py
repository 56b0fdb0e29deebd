"""Private folders among folders of other users: nothing planted by others is used, followed or removed."""

import os
import stat
import threading

import pytest

from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.private import NotPrivate

STRANGER = 65534  # no user
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")


def test_a_new_folder_belongs_only_to_this_user(tmp_path):
    before = os.umask(0)
    try:
        private.create(tmp_path / "own")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "own").st_mode) == 0o700


@pytest.mark.parametrize("make", [private.create, private.share])
@pytest.mark.parametrize("there", ["a folder", "nothing"])
def test_a_planted_link_is_refused_and_not_followed(tmp_path, make, there):
    target = tmp_path / "victim"
    if there == "a folder":
        target.mkdir(mode=0o700)
    (tmp_path / "own").symlink_to(target)
    with pytest.raises((NotPrivate, FileExistsError)):
        make(tmp_path / "own")
    assert not target.exists() or not list(target.iterdir())


def test_a_file_in_its_place_is_refused(tmp_path):
    (tmp_path / "own").touch()
    with pytest.raises(NotPrivate, match="found a file, expected a folder"):
        private.share(tmp_path / "own")


def test_a_folder_that_others_can_open_is_refused(tmp_path):
    for rights in (0o701, 0o710, 0o720, 0o777):
        (tmp_path / f"{rights:o}").mkdir()
        (tmp_path / f"{rights:o}").chmod(rights)
        with pytest.raises(NotPrivate, match=f"found rights {rights:o}"):
            private.share(tmp_path / f"{rights:o}")


@as_root
def test_a_folder_of_another_user_is_refused_and_stays(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    os.chown(tmp_path / "own", STRANGER, STRANGER)
    with pytest.raises(NotPrivate, match=f"of user {STRANGER}"):
        private.share(tmp_path / "own")
    private.remove(tmp_path / "own")
    assert (tmp_path / "own").is_dir()


def test_making_a_folder_twice_is_an_error_unless_shared(tmp_path):
    private.share(tmp_path / "own")
    (tmp_path / "own" / "file").touch()
    private.share(tmp_path / "own")
    with pytest.raises(FileExistsError):
        private.create(tmp_path / "own")
    assert (tmp_path / "own" / "file").exists()


def test_concurrent_makers_share_one_folder(tmp_path):
    start, made, shared = threading.Barrier(8), [], []

    def begin():
        start.wait()
        try:
            private.create(tmp_path / "own")
            made.append(1)
        except FileExistsError:
            private.share(tmp_path / "own")
            shared.append(1)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(shared)) == (1, 7)


def test_a_place_where_others_could_replace_it_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(NotPrivate, match="sticky"):
        private.create(tmp_path / "own")
    assert not (tmp_path / "own").exists()
    tmp_path.chmod(0o1777)
    private.create(tmp_path / "own")


@as_root
def test_a_place_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, STRANGER, STRANGER)
    with pytest.raises(NotPrivate, match=f"of user {STRANGER}"):
        private.create(tmp_path / "own")


@as_root
def test_only_the_users_own_group_may_write_to_the_place(tmp_path):
    tmp_path.chmod(0o775)
    private.create(tmp_path / "first")
    os.chown(tmp_path, -1, STRANGER)
    with pytest.raises(NotPrivate, match="sticky"):
        private.create(tmp_path / "second")


def test_the_place_is_the_first_that_is_safe_and_short_enough(tmp_path, monkeypatch):
    long, short = tmp_path / "long" / ("x" * 60), tmp_path / "t"
    for folder in (long, short):
        folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert private.place() == str(long)
    assert private.place(len(str(short)), [str(short)]) == str(short)
    assert private.place(len(str(short))) in private.PLACES
    short.chmod(0o777)
    problems = [
        f"{short}: found rights 777.*",
        *(f"{place}: its path is longer than 1 bytes" for place in (long, *private.PLACES)),
    ]
    with pytest.raises(NotPrivate, match="; ".join(problems)):
        private.place(1, [str(short)])


def test_removing_follows_no_link_and_accepts_missing_folders(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "file").touch()
    (tmp_path / "link").symlink_to(victim)
    private.remove(tmp_path / "link")
    private.create(tmp_path / "own")
    (tmp_path / "own" / "inside").symlink_to(victim)
    private.remove(tmp_path / "own")
    private.remove(tmp_path / "own")
    assert not (tmp_path / "own").exists()
    assert (victim / "file").exists()
    assert (tmp_path / "link").is_symlink()


def test_a_run_folder_is_removed_with_its_last_entry(tmp_path):
    run = tmp_path / "rlflow-0123"
    private.create(run)
    for name in ("one", "two"):
        private.create(run / name)
    private.remove(run / "one")
    assert run.is_dir()
    private.remove(run / "two")
    assert not run.exists()
    assert tmp_path.is_dir()
