//! Products are right in every format, at every level, whatever the batch and the threads.

use servekit_kernels::{Format, Level, Matrix, Pool};

/// Numbers of a fixed sequence.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn float(&mut self) -> f32 {
        (self.next() % 2001) as f32 / 1000.0 - 1.0
    }
}

/// float16s 0.0078 to 0.06.
const SMALL_HALF: std::ops::Range<u64> = 0x2000..0x2b00;

/// A row of stored weights with sane scales, and what it stands for, worked out from the format's description.
fn row(format: Format, width: usize, numbers: &mut Numbers) -> (Vec<u8>, Vec<f64>) {
    let mut bytes: Vec<u8> = (0..format.row_bytes(width)).map(|_| numbers.next() as u8).collect();
    let block_bytes = format.row_bytes(format.weights());
    let mut values = Vec::new();
    for block in bytes.chunks_mut(block_bytes) {
        let halves: &[usize] = match format {
            Format::F16 => &[],
            Format::Q4_0 | Format::Q8_0 => &[0],
            Format::Q4_1 | Format::Q4K | Format::Q5K => &[0, 2],
            Format::Q6K => &[208],
            Format::F32 | Format::Bf16 => &[],
        };
        for at in halves {
            block[*at..at + 2].copy_from_slice(&half_bits(numbers).to_le_bytes());
        }
        match format {
            Format::F32 => block.chunks_mut(4).for_each(|b| b.copy_from_slice(&numbers.float().to_le_bytes())),
            Format::F16 => block.chunks_mut(2).for_each(|b| b.copy_from_slice(&half_bits(numbers).to_le_bytes())),
            Format::Bf16 => {
                block.chunks_mut(2).for_each(|b| b.copy_from_slice(&numbers.float().to_le_bytes()[2..]));
            }
            _ => {}
        }
        values.extend((0..format.weights()).map(|i| value(format, block, i)));
    }
    (bytes, values)
}

fn half_bits(numbers: &mut Numbers) -> u16 {
    (SMALL_HALF.start + numbers.next() % (SMALL_HALF.end - SMALL_HALF.start)) as u16
}

/// A normal float16.
fn half(bytes: &[u8]) -> f64 {
    let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
    (1.0 + f64::from(bits & 1023) / 1024.0) * f64::from(i32::from(bits >> 10 & 31) - 15).exp2()
}

/// Of the 32 weights `part` of a block of Q4_K or Q5_K.
fn scale_and_offset(block: &[u8], part: usize) -> (f64, f64) {
    let s = &block[4..16];
    let (scale, offset) = match part {
        0..4 => (s[part] & 63, s[part + 4] & 63),
        _ => (s[part + 4] & 15 | s[part - 4] >> 6 << 4, s[part + 4] >> 4 | s[part] >> 6 << 4),
    };
    (f64::from(scale), f64::from(offset))
}

fn value(format: Format, block: &[u8], i: usize) -> f64 {
    let nibble = |at: usize, upper: bool| f64::from(if upper { block[at] >> 4 } else { block[at] & 15 });
    match format {
        Format::F32 => {
            f64::from(f32::from_le_bytes([block[4 * i], block[4 * i + 1], block[4 * i + 2], block[4 * i + 3]]))
        }
        Format::F16 => half(&block[2 * i..]),
        Format::Bf16 => f64::from(f32::from_le_bytes([0, 0, block[2 * i], block[2 * i + 1]])),
        Format::Q4_0 => (nibble(2 + i % 16, i >= 16) - 8.0) * half(block),
        Format::Q4_1 => nibble(4 + i % 16, i >= 16) * half(block) + half(&block[2..]),
        Format::Q8_0 => f64::from(block[2 + i] as i8) * half(block),
        Format::Q4K => {
            let (scale, offset) = scale_and_offset(block, i / 32);
            half(block) * scale * nibble(16 + i / 64 * 32 + i % 32, i / 32 % 2 == 1) - half(&block[2..]) * offset
        }
        Format::Q5K => {
            let (scale, offset) = scale_and_offset(block, i / 32);
            let q = nibble(48 + i / 64 * 32 + i % 32, i / 32 % 2 == 1);
            let top = f64::from(block[16 + i % 32] >> (i / 32) & 1);
            half(block) * scale * (q + 16.0 * top) - half(&block[2..]) * offset
        }
        Format::Q6K => {
            let (n, l, quarter) = (i / 128, i % 32, i % 128 / 32);
            let low = nibble(64 * n + 32 * (quarter % 2) + l, quarter >= 2);
            let top = f64::from(block[128 + 32 * n + l] >> (2 * quarter) & 3);
            let scale = f64::from(block[192 + 8 * n + 2 * quarter + l / 16] as i8);
            half(&block[208..]) * scale * (low + 16.0 * top - 32.0)
        }
    }
}

#[test]
fn products_are_right_and_a_row_depends_on_nothing_else() {
    let mut numbers = Numbers(1);
    let (rows, most) = (75, 77);
    // Rows enough for panels and a rest at every level, of the matrix for several pieces and a rest.
    let widths = |format: Format| if format.weights() == 32 { [800, 544] } else { [768, 256] };
    for (format, width) in Format::ALL.into_iter().flat_map(|f| widths(f).map(|width| (f, width))) {
        let stored: Vec<_> = (0..rows).map(|_| row(format, width, &mut numbers)).collect();
        let bytes: Vec<u8> = stored.iter().flat_map(|(bytes, _)| bytes).copied().collect();
        let bias: Vec<f32> = (0..rows).map(|_| numbers.float()).collect();
        let x: Vec<f32> = (0..most * width).map(|_| numbers.float()).collect();
        for level in Level::all() {
            // SAFETY: the arrays have these sizes and outlive the matrix.
            let matrix = unsafe { Matrix::new(format, bytes.as_ptr(), bias.as_ptr(), rows, width) }.unwrap();
            let mut whole: Vec<f32> = Vec::new();
            for (count, threads) in [
                (most, 1),
                (1, 1),
                (1, 2),
                (2, 2),
                (3, 1),
                (4, 2),
                (5, 1),
                (6, 2),
                (7, 2),
                (13, 2),
                (30, 1),
                (48, 2),
                (most, 3),
            ] {
                let pool = Pool::new(threads).unwrap();
                let stride = rows + 5;
                let mut y = vec![f32::NAN; count * stride];
                // SAFETY: x has at least, y exactly the size that is asked for.
                unsafe { matrix.apply(&pool, *level, x.as_ptr(), y.as_mut_ptr(), count, stride) };
                if whole.is_empty() {
                    whole.clone_from(&y);
                }
                for i in 0..count {
                    for (j, (_, weights)) in stored.iter().enumerate() {
                        let x = &x[i * width..(i + 1) * width];
                        let products = || x.iter().zip(weights).map(|(x, w)| f64::from(*x) * w);
                        let expected = products().sum::<f64>() + f64::from(bias[j]);
                        let size = products().map(f64::abs).sum::<f64>() + 1.0;
                        let got = f64::from(y[i * stride + j]);
                        assert!((got - expected).abs() < 1e-6 * size, "{format:?} {level:?}: {got} for {expected}");
                    }
                    let got = &y[i * stride..(i + 1) * stride];
                    assert!(got[rows..].iter().all(|v| v.is_nan()), "{format:?} wrote beyond its rows");
                    let before = &whole[i * stride..i * stride + rows];
                    assert_eq!(&got[..rows], before, "{format:?} {level:?} {count} rows, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn a_width_that_does_not_fit_is_refused() {
    // SAFETY: it is not used.
    let refused = unsafe { Matrix::new(Format::Q4K, std::ptr::null(), std::ptr::null(), 1, 128) };
    assert_eq!(refused.unwrap_err().to_string(), "a row of 128 weights is no multiple of the 256 of Q4_K");
}
