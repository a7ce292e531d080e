// The server's answers; what it refuses becomes an Error with its own words.
export async function get(path, query = {}) {
  const told = new URLSearchParams(
    Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== ""),
  );
  let answer;
  try {
    answer = await fetch(`/api/${path}?${told}`);
  } catch {
    throw new Error("rlsys dash does not answer: it was ended, or the tunnel is closed");
  }
  if (answer.status === 403) throw new Error("this link's token is no longer valid; open the link that rlsys dash printed");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ?? `${path}: ${answer.status}`);
  return body;
}
