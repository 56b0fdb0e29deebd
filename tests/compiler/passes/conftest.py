from planned import planned_as  # noqa: F401, a fixture
