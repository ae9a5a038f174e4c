import { Title } from "@mantine/core";

export function RolloutPage() {
  return <Title order={1}>RolloutPage</Title>;
}
