// Requests JSON from the server. A refusal becomes an Error with the server's message.
export async function get(path, query = {}) {
  const params = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== ""),
  );
  let answer;
  try {
    answer = await fetch(`/api/${path}?${params}`);
  } catch {
    throw new Error("rlsys dash does not respond: it has ended, or the tunnel is closed");
  }
  if (answer.status === 403) throw new Error("the token of this page is not valid; open the link that rlsys dash printed");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `${path}: HTTP ${answer.status}`);
  return body;
}
