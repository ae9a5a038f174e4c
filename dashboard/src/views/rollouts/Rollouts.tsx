import { Title } from "@mantine/core";

export function Rollouts() {
  return <Title order={1}>Rollouts</Title>;
}
