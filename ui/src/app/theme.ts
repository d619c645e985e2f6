// Light, dark, or as the system has it. Only this choice is stored for longer than the tab is open.
import { effect, signal } from "@preact/signals";

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

function stored(): Theme {
  try {
    const found = localStorage.getItem("theme");
    return THEMES.find((theme) => theme === found) ?? "system";
  } catch {
    return "system"; // storage may be forbidden
  }
}

export const theme = signal<Theme>(stored());

effect(() => {
  const { value } = theme;
  document.documentElement.style.colorScheme = value === "system" ? "light dark" : value;
  try {
    localStorage.setItem("theme", value);
  } catch {
    // the choice lasts as long as the page
  }
});
