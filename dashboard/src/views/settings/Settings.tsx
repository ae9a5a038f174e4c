import { Title } from "@mantine/core";

export function Settings() {
  return <Title order={1}>Settings</Title>;
}
