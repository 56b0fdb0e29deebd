"""Settings that no backend of a role has are reported under the flag on the command line."""

from rlflow.config.backend_names import unknown_settings
from rlflow.config.flags import RoleConfig
from rlflow.config.meant import Known


def test_a_shared_flag_and_a_flag_of_the_role_are_distinguished():
    role = RoleConfig("actor", {"lr": 1, "lrs": 2, "betas": 3}, frozenset({"lrs"}), "local", "local")
    shared, own = unknown_settings(role, ["lr", "beta1"], Known())
    assert (shared.code, shared.found) == ("unknown-flag", "--lrs")
    assert (own.code, own.found, own.message) == (
        "unknown-setting",
        "--actor.betas",
        "role 'actor' has no setting 'betas'",
    )
