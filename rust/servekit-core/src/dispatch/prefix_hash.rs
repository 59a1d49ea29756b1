//! Names of prompts' beginnings: one number for the first 64 tokens, one for the first 128, and so on.

/// Tokens between one name and the next.
pub const CHUNK: usize = 64;
/// Most names of one prompt: what comes after so many chunks decides no dispatch.
pub const MAX_HASHES: usize = 512;

const CHUNK_BYTES: usize = CHUNK * size_of::<u32>();
/// Numbers without a pattern: digits of the square roots of 2 and 3, both odd.
const ROOT_2: u64 = 0x6A09_E667_F3BC_C909;
const ROOT_3: u64 = 0xBB67_AE85_84CA_A73B;

/// The hash of each prefix of whole chunks, shortest first: each covers all ids up to its place, and the salt.
///
/// `ids` are little-endian u32; what is left after the last whole chunk has no hash. Prompts that share a prefix share
/// its hash, and others do not, but for chance; nothing depends on it but which rank is chosen.
pub fn prefix_hashes(ids: &[u8], salt: &[u8]) -> Vec<u64> {
    let mut chain = add(ROOT_2, salt.len() as u64);
    for part in salt.chunks(size_of::<u64>()) {
        let mut word = [0; size_of::<u64>()];
        word[..part.len()].copy_from_slice(part);
        chain = add(chain, u64::from_le_bytes(word));
    }
    let chunks = ids.as_chunks::<CHUNK_BYTES>().0.iter().take(MAX_HASHES);
    chunks
        .map(|chunk| {
            for word in chunk.as_chunks::<8>().0 {
                chain = add(chain, u64::from_le_bytes(*word));
            }
            // Once more, so that the last words reach all bits, too.
            chain = add(chain, 0);
            chain
        })
        .collect()
}

/// Takes one more word in. No two words lead from one number to the same, so prompts that differ in one place differ
/// in all hashes after it.
fn add(chain: u64, word: u64) -> u64 {
    let product = (chain ^ word).wrapping_mul(ROOT_3);
    product ^ (product >> 32)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn ids(tokens: impl IntoIterator<Item = u32>) -> Vec<u8> {
        tokens.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn prompts_share_hashes_as_far_as_they_are_equal() {
        let first = prefix_hashes(&ids(0..300), b"");
        assert_eq!(first.len(), 4);
        let mut other: Vec<u32> = (0..300).collect();
        other[130] += 1;
        let other = prefix_hashes(&ids(other), b"");
        assert_eq!(first[..2], other[..2]);
        assert!(first[2] != other[2] && first[3] != other[3], "a hash covers all before it");
        assert!(prefix_hashes(&ids(0..63), b"").is_empty());
        assert_eq!(prefix_hashes(&ids(0..100_000), b"").len(), MAX_HASHES);
    }

    #[test]
    fn another_salt_is_another_prompt() {
        let salts = [&b""[..], b"\0", b"a", b"b", b"12345678", b"123456789", b"12345678\0"];
        let hashes: HashSet<_> = salts.iter().map(|salt| prefix_hashes(&ids(0..64), salt)).collect();
        assert_eq!(hashes.len(), salts.len());
    }

    #[test]
    fn similar_prompts_do_not_meet() {
        let mut seen = HashSet::new();
        for place in 0..64 {
            for value in 0..2000 {
                let mut tokens = [7; 64];
                tokens[place] = value;
                seen.extend(prefix_hashes(&ids(tokens), b"").iter().map(|hash| hash & 0xFFFF_FFFF_FFFF));
            }
        }
        assert_eq!(seen.len(), 64 * 2000 - 63, "7 everywhere is one prompt, met at each place");
    }
}
