import { Title } from "@mantine/core";

export function RunOverview() {
  return <Title order={1}>RunOverview</Title>;
}
