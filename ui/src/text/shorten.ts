// Texts that are cut for a place with little room.

/** The text in at most `most` UTF-16 units, of which the last is an ellipsis if it was cut. A surrogate pair stays whole. */
export function shortened(text: string, most: number): string {
  return text.length > most ? `${startOf(text, most - 1)}…` : text;
}

/** The first `most` UTF-16 units, or one less where they would end within a surrogate pair. */
export function startOf(text: string, most: number): string {
  return text.slice(0, most).replace(/[\ud800-\udbff]$/, "");
}
