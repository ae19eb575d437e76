"""A model's files between its workers: how they are cut (`layout`), what is offered (`share`), the serving end
(`server`, at the rate of `limit`), what both ends say (`wire`), and a process's part in it all (`exchange`)."""
