"""A mixture in the forms that other trainers read: one module a trainer."""
