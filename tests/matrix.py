"""What is crossed in the operations matrix: methods in both forms, at 16 bits and at low bits."""

IDENTITY = [
    "full:group=8",
    "kivi-16bit:group=8",
    "kivi-16bit:group=8,rope=post,sink=2",
    "xquant-16bit:group=8,form=mha",
    "xquant-16bit:group=8,form=gqa,sink=2",
    "xquant-cl-16bit:group=8,form=mha,first_bits=16,sink=2",
    "xquant-cl-16bit:group=8,form=gqa,first_bits=16,tail=5",
    "xquant-cl-16bit:group=8,form=mha,first_bits=16,stream=post",
]

LOW = [
    "kivi-2bit:group=8,sink=2",
    "kivi-1bit:group=8,rope=post",
    "xquant-3bit:group=8,form=mha,rotate=true",
    "xquant-2bit:group=8,form=gqa,outlier=true,tail=5",
    "xquant-4bit:group=8,form=gqa,rotate=true,first_layers=2,first_bits=8",
    "xquant-cl-2bit:group=8,form=mha,sink=2",
    "xquant-cl-2bit:group=8,form=mha,accumulator=4,rotate=true",
    "xquant-cl-3bit:group=8,form=gqa",
    "xquant-cl-1bit:group=8,form=gqa,stream=residual",
]
