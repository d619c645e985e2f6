// The scores of a select, as shares.

/** The softmax of the scores: log-probabilities become shares that add up to 1. Likeliest first. */
export function sharesOf(scores: Readonly<Record<string, number>>): { choice: string; score: number; share: number }[] {
  const entries = Object.entries(scores);
  const top = Math.max(...entries.map(([, score]) => score));
  if (!Number.isFinite(top)) return entries.map(([choice, score]) => ({ choice, score, share: 1 / entries.length }));
  const weights = entries.map(([, score]) => Math.exp(score - top));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  return entries
    .map(([choice, score], index) => ({ choice, score, share: weights[index]! / sum }))
    .sort((one, other) => other.share - one.share);
}
