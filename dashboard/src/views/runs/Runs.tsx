import { Title } from "@mantine/core";

export function Runs() {
  return <Title order={1}>Runs</Title>;
}
