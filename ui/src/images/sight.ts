// Whether the model sees images.
import type { Session } from "agentflow-client";

/** Why the model of a session gets no images, as a sentence; null if it sees them. */
export function blindness(session: Session | null): string | null {
  if (!session || session.capabilities.images) return null;
  return `${session.model} reads only text: images need a model that sees them.`;
}

/** The sentence for images whose bytes a reload has not kept. */
export const LOST = "An image was not kept for the reload: edit its turn, and add it again.";
