"""The plan in the languages of others: what each engine must be told so that it reads what the plan means."""
