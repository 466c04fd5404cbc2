"""Operations of the decode path and their implementations."""
